"""Rules for each family of operations: their calls in torch and ONNX, and their layers (`paleo.importers._builder`)."""

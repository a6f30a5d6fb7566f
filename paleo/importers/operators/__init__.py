"""Rules by family of operation: how torch and ONNX call it, and which layers it becomes (`paleo.importers._rules`)."""

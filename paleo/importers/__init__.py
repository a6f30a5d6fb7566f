"""Networks from elsewhere: torch modules, ONNX files and configurations of the transformers library."""

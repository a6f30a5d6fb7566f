"""Importers of networks: torch modules, ONNX files and configurations of the transformers library."""

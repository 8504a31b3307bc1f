"""Models of other systems as modules of this package: PyTorch, ONNX."""

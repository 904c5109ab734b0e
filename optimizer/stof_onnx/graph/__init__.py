"""ONNX files: loading, input shapes, folding and saving."""

"""stof-onnx: fast masked attention in deployed ONNX models."""

__version__ = "0.1.0"

"""Original against optimized on ONNX Runtime: random inputs, padded ones included, and a stated tolerance."""

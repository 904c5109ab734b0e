"""Exporters of real transformer architectures (random weights) and the mask zoo. Needs the extra `models`."""

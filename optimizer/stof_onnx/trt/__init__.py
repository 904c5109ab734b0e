"""From the portable file to TensorRT: lowering to plugin nodes, engines, their comparison and timing.

The only importer of tensorrt, and lazily: everything but building and running engines works without it.
"""

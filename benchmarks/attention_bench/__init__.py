"""The attention benchmark behind benchmarks/attention.py: cases, masks, our kernels, peers, timing, records, plots."""

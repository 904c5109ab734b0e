"""Every kernel configuration timed on every case: what the selection model is fitted to and judged by."""

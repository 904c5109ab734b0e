"""Host-side choices for the kernels: lowering of masks, launch statistics, selection, configurations, timers."""

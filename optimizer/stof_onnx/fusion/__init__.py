"""Fused regions between attentions: operator sequences, fusion schemes, templates, the two-stage search, plans."""

"""Which attentions TensorRT's own kernels should keep, from the times of the plain and the stof engine.

TensorRT compiles a plain model into few large nodes, so what one dense attention takes there can not be read from a
profile. But all of them together take what the plain engine takes beyond the other layers of the stof engine, and each
takes a share by its arithmetic: TensorRT computes every score. A plugin that takes longer than that share is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from stof_onnx.trt.plugin_nodes import SiteLowering


def sites_to_leave(
    sites: Sequence[SiteLowering], layers_us: Mapping[str, float], plain_us: float, stof_us: float
) -> frozenset[str]:
    """Names of the plugin sites that should lose; empty when none should, when all should, or when it can not be told.

    Args:
        sites: of the stof engine.
        layers_us: microseconds of each of its layers, by name.
        plain_us, stof_us: whole inferences.
    """
    plugins = {site.name: site for site in sites if site.kernel}
    times = {name: _time_of(name, layers_us) for name in plugins}
    known = {name: time for name, time in times.items() if time is not None}
    flops = sum(site.dense_flops for site in plugins.values())
    if len(known) < len(plugins) or not flops:
        return frozenset()
    dense_us = plain_us - (stof_us - sum(known.values()))
    left = {name for name, time in known.items() if time > dense_us * plugins[name].dense_flops / flops}
    return frozenset(left) if len(left) < len(plugins) else frozenset()


def _time_of(site: str, layers_us: Mapping[str, float]) -> float | None:
    """The layer of a plugin node bears its name, sometimes with a number behind it where names repeat."""
    if site in layers_us:
        return layers_us[site]
    numbered = re.compile(re.escape(site) + r"[_ ]?\d*")
    found = [time for name, time in layers_us.items() if numbered.fullmatch(name)]
    return found[0] if len(found) == 1 else None

"""`stof-onnx export`: argument parsing only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stof_models.errors import ExportError
from stof_models.masks import KINDS
from stof_models.options import ATTENTIONS, DTYPES, DYNAMIC, EXPORTERS, MASK_STYLES, NATIVE, ExportOptions

# Named here too, so that --help needs no torch.
_ARCHITECTURES = (
    *("bert", "modernbert", "t5-encoder", "gpt2", "llama", "mistral", "gemma2", "gemma3"),
    *("bart-decoder", "t5-decoder", "whisper", "vit", "swin"),
)
_SAME_NAMES = (
    *("mask", "cross_mask", "mask_style", "exporter", "padding", "dynamic", "dtype"),
    *("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab", "seq", "seq_kv", "max_seq", "batch", "seed"),
)
_PRESETS: dict[str, dict[str, Any]] = {
    "bert-base": {"layers": 12, "hidden": 768, "heads": 12, "vocab": 30522, "seq": 512, "batch": 1},
    "gpt-1.3b": {
        **{"layers": 24, "hidden": 2048, "heads": 16, "vocab": 50257, "seq": 1024, "batch": 1},
        **{"dtype": "fp16", "large": True},
    },
}
_DEFAULT_OPSETS = {"torchscript": 17, "dynamo": 18}
_OPSETS = {"torchscript": range(11, 21), "dynamo": range(18, 25)}
_EAGER_ONLY = frozenset({"gemma2"})  # transformers has no sdpa for it
_SDPA_OPSET = 14  # the oldest that TorchScript writes scaled_dot_product_attention in


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code: 0, or 2 with one message on stderr."""
    parser = argparse.ArgumentParser(
        prog="stof-onnx export",
        description="Exports a real transformers architecture with random weights, optionally with a mask from the "
        "zoo, and writes beside it a JSON file that says which attentions and masks it holds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    try:
        return run(_parse(parser, argv))
    except ExportError as error:
        print(f"stof-onnx export: {error}", file=sys.stderr)
        return 2


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """A preset only changes defaults: whatever else is given wins."""
    preset = parser.parse_args(argv).preset
    if preset is not None:
        parser.set_defaults(**_PRESETS[preset])
    return parser.parse_args(argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    add = parser.add_argument
    add("architecture", choices=_ARCHITECTURES, metavar="ARCHITECTURE", help="one of: " + ", ".join(_ARCHITECTURES))
    add("-o", "--output", type=Path, help="the ONNX file (ARCHITECTURE.onnx)", default=argparse.SUPPRESS)
    masks = parser.add_argument_group("mask")
    mask_help = "native (the architecture's own), or of the zoo: " + ", ".join(KINDS)
    masks.add_argument("--mask", default=NATIVE, choices=(NATIVE, *KINDS), metavar="MASK", help=mask_help)
    masks.add_argument(
        "--cross-mask", default=NATIVE, choices=(NATIVE, *KINDS), metavar="MASK", help="the same for cross attention"
    )
    masks.add_argument(
        "--mask-style",
        default="bool",
        choices=MASK_STYLES,
        help="4-D boolean constant, 4-D additive constant, or a mask function registered with transformers",
    )
    for name, what in (
        ("width", "half width of windows"),
        ("dilation", "step of dilated windows"),
        ("global-tokens", "Longformer's global tokens"),
        ("block", "BigBird's block size"),
        ("random-blocks", "BigBird's random blocks a row"),
        ("prefix", "prefix-LM's prefix"),
    ):
        masks.add_argument(f"--{name}", type=int, metavar="N", help=what, default=argparse.SUPPRESS)
    masks.add_argument("--density", type=float, metavar="P", help="of random masks", default=argparse.SUPPRESS)
    masks.add_argument("--padding", action="store_true", help="run-time padding: 2-D attention_mask inputs")
    export = parser.add_argument_group("export")
    export.add_argument("--exporter", default="torchscript", choices=EXPORTERS, help="torch's exporter")
    export.add_argument("--opset", type=int, help="17 for torchscript, 18 for dynamo", default=argparse.SUPPRESS)
    export.add_argument(
        "--attention",
        choices=ATTENTIONS,
        help="attention implementation; sdpa where the architecture has it and the exporter writes it in a form that "
        "runs, else eager",
        default=argparse.SUPPRESS,
    )
    export.add_argument("--dynamic", default="none", choices=DYNAMIC, help="dynamic axes; sequence includes batch")
    export.add_argument("--dtype", default="fp32", choices=DTYPES, help="of weights and activations")
    export.add_argument(
        "--large",
        action="store_true",
        help="billions of parameters: weights are drawn straight into external data (torchscript, text models)",
    )
    export.add_argument(
        "--graph-only",
        action="store_true",
        help="as --large, but leave the weights out: `python -m stof_models.seeded fill FILE` draws them later",
    )
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--preset", choices=_PRESETS, help="other defaults for the sizes")
    for name, value, what in (
        ("layers", 2, "layers (of encoder and decoder each)"),
        ("hidden", 64, "hidden size"),
        ("heads", 4, "attention heads"),
        ("kv-heads", 0, "key/value heads; 0: half of the heads where the architecture has grouped heads"),
        ("intermediate", 0, "feed-forward size; 0: the architecture's usual multiple"),
        ("vocab", 128, "vocabulary"),
        ("seq", 64, "sequence length (patches of vit and swin)"),
        ("seq-kv", 0, "encoder length of models with cross attention; 0: 1.5 times --seq"),
        ("max-seq", 0, "longest sequence with --dynamic sequence; 0: twice --seq"),
        ("batch", 2, "batch"),
        ("seed", 0, "of weights and random masks"),
    ):
        sizes.add_argument(f"--{name}", type=int, default=value, metavar="N", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Exports what `arguments` ask for and says what was written."""
    options = options_of(arguments)
    output = getattr(arguments, "output", Path(f"{options.family}.onnx"))
    from stof_models.export import export_model  # torch and transformers take seconds to load
    from stof_models.info import info_path
    from stof_models.large import export_large

    if arguments.large or arguments.graph_only:
        info = export_large(options, output, graph_only=arguments.graph_only)
    else:
        info = export_model(options, output)
    print(f"wrote {output} ({len(info.sites)} attention sites, described in {info_path(output).name})")
    return 0


def options_of(arguments: argparse.Namespace) -> ExportOptions:
    """The ExportOptions that parsed arguments stand for."""
    given = vars(arguments)
    mask_fields: dict[str, Any] = {
        name: given[name]
        for name in ("width", "dilation", "global_tokens", "block", "random_blocks", "prefix", "density")
        if name in given
    }
    exporter = given["exporter"]
    opset = given.get("opset", _DEFAULT_OPSETS[exporter])
    if opset not in _OPSETS[exporter]:
        known = _OPSETS[exporter]
        raise ExportError(f"the {exporter} exporter writes opsets {known.start} to {known.stop - 1}, not {opset}")
    return ExportOptions(
        family=given["architecture"],
        opset=opset,
        mask_fields=mask_fields,
        attention=given.get("attention", _attention(given["architecture"], exporter, given["dtype"], opset)),
        **{name: given[name] for name in _SAME_NAMES},
    )


def _attention(architecture: str, exporter: str, dtype: str, opset: int) -> str:
    """TorchScript writes masked float16 sdpa with mixed dtypes, which no runtime loads, and none in old opsets."""
    unfit = exporter == "torchscript" and (dtype == "fp16" or opset < _SDPA_OPSET)
    return "eager" if unfit or architecture in _EAGER_ONLY else "sdpa"


if __name__ == "__main__":
    sys.exit(main())

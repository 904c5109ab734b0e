"""Names and estimates of the GEMM variants, held to the built library where there is one."""

from __future__ import annotations

import pytest
from stof_onnx.kernels import gemm
from stof_onnx.kernels.capi import DEFAULT_LIBRARY
from stof_onnx.kernels.fused_capi import Activation, FusedLibrary, FusedParams, Template


@pytest.mark.skipif(not DEFAULT_LIBRARY.is_file(), reason="needs `make cuda`")
@pytest.mark.parametrize("template", Template)
def test_the_table_is_the_librarys(template: Template) -> None:
    built = FusedLibrary().configs(template)
    listed = gemm.VARIANTS[template.name.lower()]
    assert [(c.name, c.tile_m, c.tile_n, c.cluster_m) for c in built] == [
        (v.name, v.tile_m, v.tile_n, v.cluster) for v in listed
    ]


@pytest.mark.parametrize("template", gemm.VARIANTS)
def test_ranking_names_every_variant_once(template: str) -> None:
    for m in (1, 128, 4096, 32768):
        assert sorted(gemm.ranked(template, m, 1024, 768)) == sorted(gemm.configs(template))


@pytest.mark.parametrize("template", gemm.VARIANTS)
def test_estimates_grow_with_the_work_and_respect_the_memory(template: str) -> None:
    for name in gemm.configs(template):
        times = [gemm.estimate_us(template, name, m, 3072, 768) for m in (128, 4096, 32768)]
        assert times == sorted(times)
        moved = 2 * (32768 * 768 + 768 * 3072 + 32768 * 3072)
        assert times[-1] > moved / gemm.H200.bandwidth * 1e6
        assert gemm.estimate_us(template, name, 4096, 3072, 1536) > times[1]


def test_few_rows_are_split_and_many_are_not() -> None:
    assert gemm.ranked("gemm_epilogue", 128, 768, 3072)[0].startswith("split")
    assert not gemm.ranked("gemm_epilogue", 32768, 768, 3072)[0].startswith("split")


@pytest.mark.skipif(not DEFAULT_LIBRARY.is_file(), reason="needs `make cuda`")
@pytest.mark.parametrize("template", Template)
@pytest.mark.parametrize("activation", [Activation.NONE, Activation.GELU_ERF])
def test_the_ranking_begins_with_the_librarys_choice(template: Template, activation: Activation) -> None:
    library, name = FusedLibrary(), template.name.lower()
    for m in (1, 100, 128, 1000, 4096, 16384, 32768):
        for k, n in ((768, 768), (768, 2304), (768, 3072), (3072, 768), (2048, 5632), (4096, 11008), (2048, 2048)):
            p = FusedParams(template_id=template, activation=activation, m=m, n=n, k=k)
            index = library.auto_config(p, gemm.H200.multiprocessors)
            chosen = [gemm.configs(name)[index]] if index >= 0 else []  # rows may be too long for a norm
            assert gemm.ranked(name, m, n, k, activation=activation.name.lower())[:1] == chosen


def test_a_norm_takes_rows_of_eight_blocks() -> None:
    assert gemm.ranked("gemm_norm", 4096, 1536, 768) == ["rows128_columns192"]
    assert gemm.ranked("gemm_norm", 4096, 1544, 768) == []


def test_an_unknown_template_is_an_error() -> None:
    with pytest.raises(KeyError):
        gemm.configs("cubin")

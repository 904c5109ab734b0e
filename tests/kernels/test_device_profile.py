"""Profiles: the shipped one is whole, damaged ones are refused with one clear message, the others are derived."""

from __future__ import annotations

import json
from importlib import resources

import pytest
from stof_onnx.errors import StofError
from stof_onnx.kernels.device import Device
from stof_onnx.kernels.device_profile import datasheet_of, datasheets, derive, profile_for, read_profile
from stof_onnx.kernels.instances import all_instances

TEXT = (resources.files("stof_onnx.kernels") / "profiles" / "h200.json").read_text()
KEY = "block_sm80 d64 64x64"


def test_the_shipped_profile_knows_every_instance():
    profile = read_profile(TEXT, "h200.json")
    assert {i.key for i in all_instances()} == set(profile.instances)
    assert (profile.gpu, profile.arch, profile.figures.multiprocessors) == ("NVIDIA H200", 90, 132)
    assert not profile.derived
    stored = json.loads(TEXT)
    assert stored["date"] and stored["driver"] and stored["commit"] and stored["cases"] > 100


def damaged(path: list[str], value: object) -> str:
    data = json.loads(TEXT)
    target = data
    for name in path[:-1]:
        target = target[name]
    if value is KeyError:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT[:200], "is not JSON"),
        ("[]", "has format 'list', expected 1"),
        (damaged(["format"], 2), "has format 2, expected 1"),
        (damaged(["gpu"], KeyError), r"is damaged \(KeyError: 'gpu'\)"),
        (damaged(["instances"], []), "is damaged"),
        (damaged(["instances"], {}), "has no kernel instances"),
        (damaged(["instances", KEY], 3), "is damaged"),
        (damaged(["instances", KEY, "launch"], KeyError), f"coefficients of '{KEY}' do not fit: launch"),
        (damaged(["instances", KEY, "launch"], -1.0), "launch is -1.0, expected a positive number"),
        (damaged(["instances", KEY, "io"], "x"), "io is 'x', expected a positive number"),
        (damaged(["instances", KEY, "io"], float("nan")), "io is nan"),
        (damaged(["multiprocessors"], 0), "multiprocessors is 0"),
    ],
)
def test_damaged_profiles(text, message):
    with pytest.raises(StofError, match=message) as error:
        read_profile(text, "mine.json")
    assert "mine.json" in str(error.value)
    assert "selection.py calibrate" in str(error.value)


def test_the_measured_gpu_gets_its_profile():
    for device in (Device(90, 132, name="NVIDIA H200"), Device(90, 132), Device()):
        assert not profile_for(device).derived
    for device in (Device(90, 132, name="NVIDIA H100 80GB HBM3"), Device(90, 114), Device(80, 108), Device(120, 170)):
        assert profile_for(device).derived


def test_derived_coefficients_follow_the_datasheets():
    base = profile_for(Device())
    known = datasheet_of(Device())
    h100 = datasheet_of(Device(90, 132, name="NVIDIA H100 80GB HBM3"))
    slower = derive(base, known, h100)
    a, b = base.instances[KEY], slower.instances[KEY]
    assert b.io == pytest.approx(a.io * 4800 / 3350)
    assert (b.shared_full, b.launch, b.tail) == (a.shared_full, a.launch, a.tail)
    ada = derive(base, known, datasheet_of(Device(89, 128)))
    per_sm = (613 / 132) / (165 / 128)
    assert ada.instances[KEY].shared_full == pytest.approx(a.shared_full * (0.6 * per_sm + 0.4 * 1830 / 2520))
    assert ada.instances[KEY].alone_full >= ada.instances[KEY].shared_full
    assert ada.instances[KEY].launch == pytest.approx(a.launch * 1830 / 2520)
    assert ada.derived and "derived for NVIDIA GeForce RTX 4090" in ada.origin


def test_unknown_parts_scale_with_their_multiprocessors():
    half = datasheet_of(Device(80, 54))
    assert (half.tensor_tflops, half.bandwidth_gbs) == (156, 1019.5)
    assert datasheet_of(Device(100, 148)).arch == 90  # the next lower arch
    named = datasheet_of(Device(86, 84, name="NVIDIA RTX A6000"))
    assert (named.gpu, named.multiprocessors) == ("NVIDIA RTX A6000", 84)
    assert datasheet_of(Device(75)).arch == 80


def test_datasheets_are_positive_and_named_once():
    sheets = datasheets()
    assert len({s.gpu for s in sheets}) == len(sheets)
    for sheet in sheets:
        assert all(value > 0 for value in vars(sheet).values() if not isinstance(value, str))

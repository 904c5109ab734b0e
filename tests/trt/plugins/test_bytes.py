"""What an engine stores of a plugin: it comes back as it was, and damaged bytes are refused."""

from __future__ import annotations

import random
import secrets
import struct

import pytest

from tests.trt.plugins.host import CONFIG_BYTES, Host, Node, nodes


@pytest.mark.parametrize("node", list(nodes()), ids=str)
def test_a_plugin_survives_its_engine(host: Host, node: Node) -> None:
    plugin = host.create(node.attributes())
    assert plugin
    stored = plugin.serialize()
    assert len(stored) == CONFIG_BYTES
    restored = host.deserialize(stored)
    assert restored, host.log()
    for copy in (restored, plugin.clone(), restored.clone(), restored.attach()):
        assert copy.serialize() == stored
        assert copy.identity() == plugin.identity()
        assert copy.output_shape(node.inputs()) == node.output().dims
        assert copy.configure(node.tensors()) == plugin.configure(node.tensors())


def test_copies_outlive_their_original(host: Host) -> None:
    plugin = host.create(Node().attributes())
    assert plugin
    stored, copy, context = plugin.serialize(), plugin.clone(), plugin.attach()
    host._alive.remove(plugin.pointer.value)
    host.c.host_destroy(plugin.pointer)
    assert copy.serialize() == context.serialize() == stored


def test_every_truncation_and_extension_is_refused(host: Host) -> None:
    plugin = host.create(Node().attributes())
    assert plugin
    stored = plugin.serialize()
    for length in range(len(stored)):
        assert host.deserialize(stored[:length]) is None, length
        assert f"holds {length} bytes" in host.log()
    assert host.deserialize(stored + b"\0") is None
    assert host.deserialize(stored) is not None


def test_every_flipped_bit_is_refused(host: Host) -> None:
    plugin = host.create(Node(bias_kind="relative", kv_kind="mask").attributes())
    assert plugin
    stored = plugin.serialize()
    for bit in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        assert host.deserialize(bytes(damaged)) is None, bit
        assert host.log()


def checksummed(words: bytes, header: bytes) -> bytes:
    """`words` under a header with the checksum they need: FNV-1a, as attention_config.cpp has it."""
    total = 2166136261
    for byte in words:
        total = (total ^ byte) * 16777619 & 0xFFFFFFFF
    return header[:12] + struct.pack("<I", total) + words


def test_forged_bytes_with_a_right_checksum_never_pass_a_bad_word(host: Host) -> None:
    """Words are checked for themselves: what is accepted describes itself and plans or refuses, without a crash."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    node = Node()
    plugin = host.create(node.attributes())
    assert plugin
    stored = plugin.serialize()
    assert checksummed(stored[16:], stored) == stored
    refused = 0
    for _ in range(3000):
        words = list(struct.unpack(f"<{(CONFIG_BYTES - 16) // 4}I", stored[16:]))
        for _ in range(rng.randint(1, 3)):
            interesting = (
                0,
                1,
                2,
                3,
                7,
                64,
                0x7FFFFFFF,
                0x80000000,
                0xFFFFFFFF,
                rng.getrandbits(32),
                rng.getrandbits(9),
            )
            words[rng.randrange(len(words))] = rng.choice(interesting)
        forged = checksummed(struct.pack(f"<{len(words)}I", *words), stored)
        restored = host.deserialize(forged)
        refused += restored is None
        if restored:
            assert restored.serialize() == forged
            restored.output_shape(node.inputs())
            restored.configure(node.tensors())
        else:
            assert host.log()
    assert 500 < refused < 3000


def test_random_bytes_are_refused(host: Host) -> None:
    for length in (0, 1, 16, CONFIG_BYTES - 1, CONFIG_BYTES, CONFIG_BYTES + 1, 4000):
        assert host.deserialize(secrets.token_bytes(length)) is None
        assert host.log()

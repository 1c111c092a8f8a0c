"""Seeds of the calls that one answer consists of, each of which begins its random numbers anew."""

from __future__ import annotations


def call_seed(seed: int, made: int, tag: int = 0) -> int:
    """A seed for the call that begins after `made` tokens: 64 bits that look like no other call's.

    The first call has the request's own, so that the target alone answers as if there were no draft. Later ones: the
    finalizer of SplitMix64 (Steele, Lea, Flood 2014), over each part in turn.
    """
    if not made and not tag:
        return seed
    mask, bits = 0xFFFFFFFFFFFFFFFF, seed
    for part in (made, tag):
        bits = (bits + 0x9E3779B97F4A7C15 * (part + 1)) & mask
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        bits ^= bits >> 31
    return bits

"""Verdicts of benchmarks/cpu_peers.py: who is ahead, told from the spread of the rounds."""

from __future__ import annotations

import pytest

from benchmarks.cpu_peers import ALL, chosen_ways, summary, table, verdict


def test_a_verdict_is_over_pairs_of_rounds_beside_the_peer_with_the_best_median() -> None:
    peers = {"slow": [5.0, 50.0, 5.0], "fast": [9.0, 10.0, 12.0]}
    level = verdict([10.0, 10.0, 10.0], peers, less_is_better=False)
    assert (level.word, level.peer, level.times) == ("level", "fast", 1.0)
    assert verdict([9.1, 10.1, 12.1], peers, less_is_better=False).word == "ahead"
    assert verdict([8.9, 9.9, 11.9], peers, less_is_better=False).word == "behind"
    # Seconds and bytes: the same figures the other way round.
    costs = verdict([4.9, 49.0, 4.9], peers, less_is_better=True)
    assert (costs.word, costs.peer) == ("ahead", "slow")
    assert costs.least == pytest.approx(50 / 49)


def test_the_tables_have_each_way_that_was_measured_and_no_verdict_without_a_peer() -> None:
    rates = dict.fromkeys(("tokens_per_s_1", "tokens_per_s_8", "tokens_per_s_16"), 100.0)
    row = {**rates, "first_token_s": 0.5, "resident_mb": 900.0, "of_files_mb": 300.0, "about": "2 threads"}
    samples = {
        "ours:f32": [{**row, "first_tokens": [1, 2]}],
        "ours:bf16": [{**row, "first_tokens": [1, 3]}],
        "genai:F16": [{**row, "first_tokens": [1, 2], "first_token_s": 1.0}],
    }
    result = summary(samples)
    assert [goal["way"] for goal in result["goals"]] == ["ours:bf16"]
    text = table(result)
    assert "ahead 2.00 (2.00 to 2.00), genai:F16" in text
    assert "level 1.00" in text
    assert all(way in text for way in samples)
    assert "1 of 16" in text
    assert chosen_ways(["ours:int", "llamacpp:B"]) == ["llamacpp:BF16", "ours:int8_sq", "ours:int4_awq"]
    assert chosen_ways([""]) == list(ALL)

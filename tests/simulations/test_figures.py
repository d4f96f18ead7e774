# SPDX-License-Identifier: Apache-2.0
"""Plots of unusual runs: none, many and oddly named clients."""

from fedloom.intervals import mean_interval, wilson
from fedloom.simulations import figures


def test_many_or_oddly_named_clients_can_be_drawn():
    series = [(f"_{k} 数学", {0: 1.0, 1: 1.0 + k}) for k in range(30)]
    drawn = figures.curves(series, {0: 1.0}, title="CE", ylabel="nats", chance=1.386)
    assert "macro mean" in drawn
    assert "数学" not in drawn  # thirty names would hide the curves
    few = figures.ranges(["_数学"], {"frozen": [wilson(1, 4)]}, title="A", xlabel="share")
    assert "_数学" in few


def test_figures_of_nothing_are_still_figures():
    empty = [
        figures.curves([], {}, title="CE", ylabel="nats"),
        figures.ranges([], {}, title="A", xlabel="share"),
        figures.ranges(["a"], {"frozen": [None]}, title="A", xlabel="share"),
        figures.ranges(["a"], {"one row": [mean_interval(2, 4, 1)]}, title="A", xlabel="nats"),
        figures.traffic({}),
    ]
    assert all(svg.startswith('<svg role="img"') and svg.endswith("</svg>") for svg in empty)


def test_chance_is_one_line_or_one_a_client():
    column = {"frozen": [wilson(1, 4), wilson(2, 4)]}
    one, each = (
        figures.ranges(["a", "b"], column, title="A", xlabel="share", chance=chance)
        for chance in ([0.25, 0.25], [0.25, 0.5])
    )
    assert "chance, 0.25" in one
    assert "chance, by client" in each

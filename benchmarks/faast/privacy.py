# SPDX-License-Identifier: Apache-2.0
"""What privacy costs FAAST: accuracy against epsilon, and the error and price of masked sums.

Run as ``python benchmarks/faast/privacy.py``; the last line printed is one JSON object. Data:
scikit-learn's digits (1797 images of 8 x 8), pixels as keys cut to length 1, one-hot values; the
released sums are those of the training three quarters, and every figure is over all splits and
noise seeds. Masked sums go through Flower's messages in one process, ten percent of the clients
lost after their shares are out in a second run; seconds are of this process's CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from fedloom import border, seeds
from fedloom.ciphers import Stream, digest
from fedloom.clients.secure import masked, serve_sums
from fedloom.rules.fixed_point import BITS, rounding_bound
from fedloom.rules.private import Bounds, calibrate, client_sigma, noisy, ridge_after, solve_noisy
from fedloom.rules.solving import Factorisation
from fedloom.rules.statistics import Gram
from fedloom.secure import Collector, Keys, Summation, advertise
from fedloom.simulations.inprocess import InProcessGrid
from fedloom.strategies import Journal, ReplyStream, Roster
from fedloom.strategies.secure_sum import SecureSum

EPSILONS, DELTA = (0.5, 1.0, 2.0, 4.0, 8.0), 1e-5
ALPHA, PLAIN_RIDGE = 0.8, 1e-2
CLASSES, RUN, COUNT = 10, "be" * 16, "count"
BOUNDS = Bounds(1.0, 1.0)
Split = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]
Solver = Callable[[Gram, float, Stream], NDArray[np.float64]]


def split(number: int) -> Split:
    """Divide the digits three to one: keys and labels to sum over, keys and labels to test."""
    found = load_digits()
    keys, labels = found.data / 16.0, found.target.astype(np.int64)
    order = seeds.generator(0, number, "digits").permutation(len(keys))
    cut = len(keys) - len(keys) // 4
    train, test = order[:cut], order[cut:]
    return keys[train], labels[train], keys[test], labels[test]


def accuracy(weights: NDArray[np.float64], keys: NDArray[Any], labels: NDArray[Any]) -> float:
    """Share of right labels; a key's length does not change its answer."""
    return float((keys @ weights).argmax(axis=1).__eq__(labels).mean())


def by_ridge(gram: Gram, sigma: float, stream: Stream) -> NDArray[np.float64]:
    """Release as ``noisy`` does and solve with the ridge that belongs to it."""
    return solve_noisy(noisy(gram, sigma, stream, BOUNDS), sigma).weights


def by_triangle(gram: Gram, sigma: float, stream: Stream) -> NDArray[np.float64]:
    """Sigma on every entry of the packed triangle, and the ridge 2 sigma sqrt(d)."""
    drawn = sigma * stream.normals(gram.packed.size + gram.cross.size)
    packed = gram.packed + drawn[: gram.packed.size]
    cross = gram.cross + drawn[gram.packed.size :].reshape(gram.cross.shape)
    ridge = 2 * sigma * np.sqrt(gram.keys)
    return solve_noisy(Gram(packed, cross, np.nan, 1), sigma, ridge).weights


def by_dropping(gram: Gram, sigma: float, stream: Stream) -> NDArray[np.float64]:
    """The same release and ridge, but without the directions of negative eigenvalues."""
    made = noisy(gram, sigma, stream, BOUNDS)
    ridge = ridge_after(sigma, gram.keys)
    return Factorisation.of(made).solve(alpha=None, ridge=ridge).weights


def by_filter(gram: Gram, sigma: float, stream: Stream) -> NDArray[np.float64]:
    """Release as ``noisy`` does and solve with FAAST's own filter."""
    made = noisy(gram, sigma, stream, BOUNDS)
    return Factorisation.of(made).solve(alpha=ALPHA).weights


def by_clients(gram: Gram, sigma: float, stream: Stream) -> NDArray[np.float64]:
    """Ten clients' own noise where seven were counted on, and all ten came."""
    return by_ridge(gram, client_sigma(sigma, 7) * np.sqrt(10), stream)


SOLVERS: dict[str, Solver] = {
    "ridge": by_ridge,
    "ridge, noise of 10 clients (7 promised)": by_clients,
    "ridge, sigma on the packed triangle": by_triangle,
    "ridge, negative directions dropped": by_dropping,
    "FAAST's filter": by_filter,
}


def curve(splits: int, draws: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Return accuracy in percent by solver and epsilon, and without noise."""
    rows: dict[str, dict[float, list[float]]] = {n: {e: [] for e in EPSILONS} for n in SOLVERS}
    plain: dict[str, list[float]] = {"filter": [], "ridge": []}
    for number in range(splits):
        keys, labels, test, truth = split(number)
        gram = BOUNDS.gram(keys, np.eye(CLASSES)[labels])
        solved = Factorisation.of(gram)
        plain["filter"].append(accuracy(solved.solve(alpha=ALPHA).weights, test, truth))
        best = solved.solve(alpha=None, ridge=PLAIN_RIDGE)
        plain["ridge"].append(accuracy(best.weights, test, truth))
        for epsilon in EPSILONS:
            sigma = calibrate(epsilon, DELTA, BOUNDS.sensitivity())
            for draw in range(draws):
                # A fixed key for each draw, so that the figures come out again; never do so else.
                key = digest(f"{number}/{epsilon}/{draw}".encode())
                for name, solver in SOLVERS.items():
                    weights = solver(gram, sigma, Stream(key))
                    rows[name][epsilon].append(100 * accuracy(weights, test, truth))
    told = {
        name: {str(e): [round(mean(v), 2), round(stdev(v), 2)] for e, v in by.items()}
        for name, by in rows.items()
    }
    return told, {name: round(100 * mean(v), 2) for name, v in plain.items()}


class TimedGrid(InProcessGrid):
    """Counts the clients' CPU seconds by what they were asked; loses some clients' numbers."""

    def __init__(self, app: ClientApp, nodes: int, lost: set[int]) -> None:
        super().__init__(app, nodes, {})
        self.seconds: Counter[str] = Counter()
        self._lost = lost

    def _deliver(self, name: str, message: Message) -> Message:
        kind = message.metadata.message_type
        if kind.startswith("train") and message.metadata.dst_node_id - 1000 in self._lost:
            raise RuntimeError("a lost client was asked")
        began = time.process_time()
        reply = super()._deliver(name, message)
        self.seconds[kind] += time.process_time() - began
        return reply


def lifted(keys: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Return ``width`` random rectified features of the keys, of a fixed seed."""
    if width == keys.shape[1]:
        return keys
    drawn = seeds.generator(0, width, "features").normal(size=(keys.shape[1], width))
    return np.asarray(np.maximum(keys @ drawn, 0.0) / np.sqrt(keys.shape[1]), np.float64)


def holdings(clients: int, width: int) -> list[Gram]:
    """Deal the rows of the first split out to clients."""
    keys, labels, _, _ = split(0)
    lift, hot = lifted(keys, width), np.eye(CLASSES)[labels]
    return [Gram.of(lift[c::clients], hot[c::clients]) for c in range(clients)]


def client_app(grams: list[Gram]) -> ClientApp:
    """Serve masked sums of these Grams, by partition."""
    app = ClientApp()
    serve_sums(app)

    @app.train("sum")
    def train(message: Message, context: Context) -> Message:
        gram = grams[int(context.node_config["partition-id"])]
        sums = {**gram.arrays(), COUNT: np.array([float(gram.count)])}
        words = masked(context, border.config_of(message.content), sums)
        return Message(border.content(words, metrics={}), reply_to=message)

    return app


def summed(clients: int, width: int, lose: int = 0) -> dict[str, Any]:
    """Sum over clients under masks; return errors, bytes and seconds."""
    grams, lost = holdings(clients, width), set(range(0, 2 * lose, 2))
    grid = TimedGrid(client_app(grams), clients, lost)
    roster = Roster({c: 1000 + c for c in range(clients)}, {})
    journal, stream = Journal(), ReplyStream(grid, 60.0)
    began = time.process_time()
    sums = SecureSum(roster, RUN, journal)
    asked = [c for c in sums.begin(stream, 1, roster.partitions) if c not in lost]
    built = [Message(border.content({}, sums.told(c)), 1000 + c, "train.sum") for c in asked]
    for message in built:
        journal.weigh(message.content, server_round=1, phase="sum", direction="down", partition=0)
    for reply in stream.send_and_receive(built):
        journal.weigh(reply.content, server_round=1, phase="sum", direction="up", partition=0)
        sums.take(reply.metadata.src_node_id - 1000, border.arrays_of(reply.content))
    found = sums.finish()
    whole = time.process_time() - began
    total = Gram.from_arrays(found.arrays, float(found.arrays[COUNT][0]))
    exact = sum((g for c, g in enumerate(grams) if c not in lost), Gram.zero(width, CLASSES))
    wanted, got = (Factorisation.of(g).solve(alpha=ALPHA).weights for g in (exact, total))
    gram_error = np.abs(total.packed - exact.packed).max() / np.abs(exact.packed).max()
    payload = 8 * (exact.packed.size + exact.cross.size + 2)
    return {
        "clients": clients,
        "width": width,
        "lost": len(lost),
        "w_error": float(np.abs(got - wanted).max() / np.abs(wanted).max()),
        "sums_error": float(gram_error),
        "count_right": total.count == exact.count,
        "up_bytes_per_client": round(journal.bytes_of(1, "up") / clients),
        "down_bytes_per_client": round(journal.bytes_of(1, "down") / clients),
        "bare_up_bytes": payload,
        "client_seconds": round(sum(grid.seconds.values()) / clients, 4),
        "server_seconds": round(whole - sum(grid.seconds.values()), 4),
    }


def wide_mask(clients: int, width: int) -> float:
    """Return the CPU seconds in which one client masks sums of wide keys for many peers."""
    here = Summation(RUN, 1)
    needed = clients // 2 + 1
    collector, sessions = Collector(here, needed), {}
    for c in range(clients):
        sessions[c], keys = advertise(here, c)
        collector.add_keys(c, Keys(*keys))
    peers = collector.keys()
    for c, session in sessions.items():
        sessions[c], letters, seed_digest = session.share(peers, needed)
        collector.add_letters(c, letters, seed_digest)
    arrays = Gram.zero(width, CLASSES).arrays()
    letters = collector.letters_to(0)
    began = time.process_time()
    sessions[0].mask(letters, arrays, BITS)
    return time.process_time() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 50, 100])
    args = parser.parse_args()
    rows, plain = curve(args.splits, args.draws)
    print(f"accuracy in percent (standard deviation), delta {DELTA}; without noise {plain}")
    print("| solved by | " + " | ".join(f"eps {e}" for e in EPSILONS) + " |")
    print("| --- |" + " --- |" * len(EPSILONS))
    for name, by in rows.items():
        print(f"| {name} | " + " | ".join(f"{m:.1f} ({s:.1f})" for m, s in by.values()) + " |")
    settings = [(c, w, c // 10 * (w > 64)) for w in (64, 256) for c in args.clients]
    sums = [summed(*setting) for setting in settings]
    print("\n| " + " | ".join(sums[0]) + " |\n|" + " --- |" * len(sums[0]))
    for row in sums:
        cells = (f"{v:.2g}" if isinstance(v, float) and v < 1e-3 else str(v) for v in row.values())
        print("| " + " | ".join(cells) + " |")
    print(
        json.dumps(
            {
                "accuracy": rows,
                "accuracy_without_noise": plain,
                "delta": DELTA,
                "splits": args.splits,
                "draws": args.draws,
                "max_w_error": max(row["w_error"] for row in sums),
                "sums_bound": rounding_bound(max(args.clients)),
                "masked_sums": sums,
                "mask_seconds_d1024_100_clients": round(wide_mask(100, 1024), 3),
                "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
                "numpy": np.__version__,
                "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
            }
        )
    )


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Flower strategies: sampling, checks, ledger and folding; no torch."""

from fedloom.strategies.adapter_strategy import AdapterStrategy as AdapterStrategy
from fedloom.strategies.fednl import FedNL as FedNL
from fedloom.strategies.journal import Journal as Journal
from fedloom.strategies.roster import ReplyStream as ReplyStream
from fedloom.strategies.roster import Roster as Roster

"""The prompts of `coppice demo`: questions for a chat model, and beginnings of Python code for the bundled target.

All were written for this purpose. Those of code end where a word ends: tokenizers of code join a line break with the
indentation after it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt and what to call it."""

    name: str
    text: str
    # Whether the target's chat template is applied to it.
    is_question: bool = False


QUESTIONS = (
    DemoPrompt("a fact", "What is the capital of France, and what is it known for?", is_question=True),
    DemoPrompt("code", "Write a Python function that returns the sum of the even numbers in a list.", is_question=True),
    DemoPrompt(
        "a summary",
        "Summarise in one sentence: The harbour was closed for three days because of the storm. Ships waited outside, "
        "and two ferries turned back. On the fourth day the wind fell and the harbour opened again.",
        is_question=True,
    ),
    DemoPrompt(
        "a correction",
        "Repeat this sentence with its mistakes corrected: She go to the market yesterday and buyed three apple.",
        is_question=True,
    ),
    DemoPrompt("a list", "List five things to take on a hike in the mountains.", is_question=True),
    DemoPrompt("an explanation", "Explain to a child why the sky is blue.", is_question=True),
)


PROMPTS = (
    DemoPrompt(
        "a parser of settings",
        '''import os


def read_settings(path, defaults=None):
    """Read lines of the form "name = value" from a file.

    Empty lines and lines that start with "#" are ignored. Names that the
    file does not set keep their default.
    """
    settings = dict(defaults or {})
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue''',
    ),
    DemoPrompt(
        "a bounded cache",
        '''from collections import OrderedDict


class BoundedCache:
    """A mapping that forgets the entry that was not used for the longest time."""

    def __init__(self, max_size=128):
        if max_size < 1:
            raise ValueError("max_size must be at least 1")
        self._max_size = max_size
        self._entries = OrderedDict()

    def __len__(self):
        return len(self._entries)

    def get(self, key, default=None):
        """Return the value of a key and count it as used."""''',
    ),
    DemoPrompt(
        "a command line",
        '''import argparse
import sys


def build_parser():
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Count words in text files.")
    parser.add_argument("paths", nargs="*", help="files to read; standard input when there are none")
    parser.add_argument("-n", "--limit", type=int, default=10, help="how many words to print")
    parser.add_argument(''',
    ),
    DemoPrompt(
        "tests of a queue",
        """import unittest

from tasks import Task, TaskQueue


class TaskQueueTest(unittest.TestCase):
    def setUp(self):
        self.queue = TaskQueue()

    def test_new_queue_is_empty(self):
        self.assertEqual(len(self.queue), 0)
        self.assertIsNone(self.queue.peek())

    def test_tasks_come_out_in_order(self):
        first = Task("first")
        second = Task("second")
        self.queue.push(first)""",
    ),
    DemoPrompt(
        "a socket server",
        '''import logging
import socket
import threading

logger = logging.getLogger(__name__)


class EchoServer:
    """Sends back to each client whatever it receives."""

    def __init__(self, host="127.0.0.1", port=0):
        self.host = host
        self.port = port
        self._socket = None
        self._threads = []
        self._stopped = threading.Event()

    def start(self):
        """Listen for clients in a thread of its own."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)''',
    ),
    DemoPrompt(
        "a walk over files",
        '''import hashlib
from pathlib import Path


def find_duplicates(root):
    """Yield groups of files under a directory that have the same content."""
    by_size = {}
    for path in sorted(Path(root).rglob("*")):
        if path.is_file():
            by_size.setdefault(path.stat().st_size, []).append(path)
    for size, paths in by_size.items():
        if len(paths) < 2:
            continue''',
    ),
)

"""`runnerctl chat` on a real pseudo-terminal, with the real model."""

import os
import select
import signal
import sys
import time

import pytest

pty = pytest.importorskip("pty")
pytestmark = pytest.mark.slow


class Session:
    """A child on a terminal of its own. Every wait is bounded; a hang is an error, not a wait."""

    def __init__(self, *arguments):
        self.seen = b""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm", COLUMNS="60", LANG="C.UTF-8")
            os.execv(sys.executable, [sys.executable, "-m", "runnerctl", "chat", *arguments])

    def type(self, keys):
        os.write(self.terminal, keys)

    def expect(self, text, seconds=120):
        """Read on until `text` appears; what came before it is dropped."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come after {self.seen!r}"
            if select.select([self.terminal], [], [], 0.2)[0]:
                self.seen += os.read(self.terminal, 4096)
        self.seen = self.seen.partition(text)[2]

    def exit_code(self, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        raise AssertionError("the program did not end")

    def close(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.terminal)


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_conversation(smollm2):
    session = Session("--max-tokens", "500", "--ignore-eos")
    try:
        session.expect(b"> ")
        session.type(b"\r")  # nothing typed: it asks again
        session.expect(b"> ")
        session.type("Tell me a long story about the sea. 海 🌊\r".encode())
        session.expect("🌊\r\n".encode())
        session.expect(b"The")
        session.type(b"\x03")
        session.expect(b"(stopped)")
        session.expect(b"> ")
        session.type(b"/help\r")
        session.expect(b"/clear")
        session.expect(b"> ")
        session.type(b"\x04")
        assert session.exit_code() == 0
    finally:
        session.close()

"""A worker: python worker.py QUEUE. DATABASE_URL says where the database is (default: libpq's own variables).

One process does one task at a time: start as many as you like. Put your own work into `work`.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress

import psycopg

WAIT = "20 s"  # how long a claim waits for a task: below a minute, since it holds a snapshot

log = logging.getLogger("worker")


class Stop(KeyboardInterrupt):
    """SIGTERM came while nothing was being done. psycopg cancels the statement of a KeyboardInterrupt."""


def work(payload, lost):
    """Does a task and returns its cost: replace this. When `lost` is set, the task runs elsewhere: stop."""
    seconds = float(payload.get("seconds", 0))
    lost.wait(seconds)
    if "error" in payload:
        raise RuntimeError(payload["error"])
    return seconds or None  # no cost: the charge of the claim stands


class Worker:
    def __init__(self, queue):
        self.queue = queue
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.db = None
        self.stopping = self.idle = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)

    def stop(self, *_):
        self.stopping = True
        if self.idle:
            raise Stop

    def run(self):
        with suppress(Stop):
            while not self.stopping:
                if task := self.claim():
                    self.do(*task)
        log.info("stopped")

    def claim(self):
        # In a transaction: a Stop at any moment rolls the claim back, and the task stays pending.
        self.idle = True
        if self.stopping:  # the signal came before `idle` was set
            raise Stop
        try:
            return self.call(
                """SELECT id, lease, payload, extract(epoch FROM lease_until - clock_timestamp())::float8
                   FROM fair_claim(%s, %s, wait => %s)""",
                self.queue, self.name, WAIT,
            )
        finally:
            self.idle = False

    def do(self, id, lease, payload, lease_seconds):
        try:
            with self.heartbeat(id, lease, lease_seconds / 3) as lost:
                cost = work(payload, lost)
        except Exception as error:
            # Pending again after a second, then two, four ... up to an hour; failed at max_attempts.
            log.exception("task %s", id)
            self.call("SELECT fair_fail(%s, %s, %s)", id, lease, str(error) or repr(error))
        else:
            # Results that must be written just once belong into the transaction of this call: roll back if it is false.
            if not self.call("SELECT fair_complete(%s, %s, %s)", id, lease, cost)[0]:
                log.warning("task %s: lease lost, it runs again", id)

    @contextmanager
    def heartbeat(self, id, lease, period):
        done, lost = threading.Event(), threading.Event()

        def beat():
            while not done.wait(period):
                if self.call("SELECT fair_extend(%s, %s)", id, lease)[0] is None:
                    return lost.set()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield lost
        finally:
            done.set()
            thread.join()  # from here on the connection is this thread's alone

    def call(self, sql, *values):
        """The first row of a statement in a transaction of its own, repeated until the server has answered."""
        while True:
            try:
                if self.db is None or self.db.closed:
                    self.db = psycopg.connect(os.environ.get("DATABASE_URL", ""), autocommit=True)
                with self.db.transaction():
                    row = self.db.execute(sql, values).fetchone()
                    self.idle = False
                return row
            except psycopg.OperationalError as error:
                log.warning("database: %s", str(error).strip())
                time.sleep(1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    Worker(sys.argv[1]).run()

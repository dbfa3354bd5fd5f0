"""What all tests share."""

import os

# Before torch is imported: tests run in a process for each core, so a thread each is enough. With two, threads of
# several processes wait for one another in busy loops, and tests of rollouts took eight times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

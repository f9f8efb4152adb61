"""The serving loop, the store's tiers and the prefix tree on a simulated clock.

The scheduler, its queue and limits, the read queue, the loading depth, the memory tier, the disk budget, the ledger,
the prefix tree and every eviction policy are the library's own objects. Simulated are the clock, what takes time, and
the tensors. See ``docs/simulation.md``.
"""

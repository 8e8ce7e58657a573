"""Figures of this machine: how fast, how small, how quick to be back.

Every bench starts real processes on loopback in a folder of its own, measures, and ends them by
their ids. Rates drift by the hour on shared machines, so what is compared runs interleaved in one
run and is reported as a ratio; `bench/README.md` says what each figure means.
"""

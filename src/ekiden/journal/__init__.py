"""The journal: what must survive goes in first and is applied after it is committed.

It stores payloads under consecutive indices and does not know what a job is. `local` is a journal
on one disk; docs/JOURNAL.md describes its bytes.
"""

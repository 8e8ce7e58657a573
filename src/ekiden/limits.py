"""Every bound and default, each with its reason.

Nothing in ekiden grows without one of these. What a user may tune is read from `config` with these
as defaults; what protects the process itself is fixed here.
"""

from __future__ import annotations

from typing import Final

NS: Final = 1_000_000_000
"""Nanoseconds in a second: all machine time is integer nanoseconds, so nothing drifts."""

# ------------------------------------------------------------------ wire

PROTOCOL_VERSION: Final = 1

# Largest frame body. Files have their own lane, so this bounds a batch of jobs or results. A peer
# may leave one frame unfinished: 1,000 peers cost at most 1 GiB.
FRAME_BYTES_MAX: Final = 1 << 20

# Before a peer has proved who it is: enough for a hello with long names, no more.
FRAME_BYTES_MAX_BEFORE_HELLO: Final = 4096

# A stranger gets this long to say hello and prove its key.
HELLO_TIMEOUT_NS: Final = 5 * NS

# An address that does not answer must not keep the next one waiting.
DIAL_TIMEOUT_NS: Final = 5 * NS

# A connection we close gets this long to take what was sent (the reason, above all), and may still
# send this much, which is thrown away: closing with bytes unread would reset it, reason and all.
LINGER_NS: Final = 2 * NS
LINGER_BYTES_MAX: Final = 4 << 20

# Out of file descriptors: wait this long before accepting again, instead of spinning.
ACCEPT_PAUSE_NS: Final = 1 * NS

# What the jobs of a submit share, encoded. It is repeated in every assign, so it must leave room
# for a payload of the largest size in the same frame.
SPEC_BYTES_MAX: Final = 64 << 10

# Jobs in one Submit or one Assign. Batches beyond this gain nothing measurable and make turns long.
BATCH_JOBS_MAX: Final = 4096

# What the client library puts in one Submit: small enough to interleave with results.
CLIENT_BATCH_JOBS: Final = 1000
CLIENT_BATCH_BYTES: Final = 256 << 10

# What a client has on the wire without an answer. Several commits' worth keeps the broker busy;
# more would only wait in its socket, out of reach of a reconnect to another broker.
CLIENT_WINDOW_JOBS: Final = 20_000
CLIENT_WINDOW_BYTES: Final = 16 << 20

# Questions of one client without an answer: each is a caller that waits.
CLIENT_ASKS_MAX: Final = 10_000

# Published messages a subscriber has not looked at yet; beyond it the oldest are dropped.
SUBSCRIPTION_BACKLOG: Final = 10_000

# One job's payload or result inside a frame; half a frame, so that names and args always fit.
PAYLOAD_BYTES_MAX: Final = 512 << 10

# A file of a job, or a result, travels inside its frame up to this size; larger ones go by way of
# the broker's store, so that no journal entry grows by what nobody may ever fetch.
INLINE_FILE_BYTES: Final = 64 << 10

# What a failed attempt may leave beside its words: room for an exception with some data in it. It
# stays in the broker's memory for as long as the failure is kept.
DETAIL_BYTES_MAX: Final = 8 << 10

# Results up to this size stay in the broker's memory; larger ones are read back from the journal.
RESULT_BYTES_IN_MEMORY: Final = 1024

# Bytes queued for a peer that does not read, before it is dropped as a slow reader.
OUTBOX_BYTES_MAX: Final = 64 << 20

# From here on results wait in the book for the peer to catch up, so a slow line is never cut off
# for having much to fetch; published messages, which wait nowhere, may pile up this much further.
CONGESTED_BYTES: Final = 4 << 20
RELAY_OUTBOX_BYTES_MAX: Final = 8 << 20

# Results owed to a peer that fell behind or attached: this much in one turn.
OWED_BYTES_PER_TURN: Final = 4 << 20

# Relay messages forwarded in one turn, so that publish cannot starve the ledger.
RELAY_MESSAGES_PER_TURN: Final = 2000

# Slots or credit of one worker: far more than any machine has, so that sums of them stay small.
SLOTS_MAX: Final = 1 << 20

SUBSCRIPTIONS_PER_CONNECTION: Final = 1000
PATTERNS_PER_WORKER: Final = 1000
CONNECTIONS_MAX: Final = 10_000

# ------------------------------------------------------------------ bulk

# One part of a file on the wire: large enough that its overhead does not show, small enough that a
# job's message behind it on a line of 1 Gbit/s waits 2 ms.
BLOB_PART_BYTES: Final = 256 << 10

# On a connection that does not leave the machine nothing waits for a line, and what is done for
# each part costs as much as moving its bytes. Twice as much again gained a tenth, and a job's
# message behind it waited longer.
BLOB_LOCAL_PART_BYTES: Final = 512 << 10

# Parts of one transfer asked for and not yet written: one on the way, one being written, and some
# slack for either. Of all transfers of a connection together twice as many, so that what lies in
# front of the ledger's messages, and in memory, does not grow with the number of transfers.
BLOB_WINDOW_PARTS: Final = 4
BLOB_CONNECTION_PARTS: Final = 8

# Transfers that a client or a worker has under way; the rest waits. More would only share the line.
BLOB_TRANSFERS_MAX: Final = 8

# Uploads that a broker pulls at a time, from everybody; with full windows 16 MiB of parts. Offers
# beyond wait for their turn, up to these bounds, which keep what is remembered of them small.
BLOB_UPLOADS_PULLED: Final = 16
BLOB_OFFERS_PER_CONNECTION: Final = 64
BLOB_OFFERS_MAX: Final = 10_000

# Parts a connection may have asked for, and parts the broker reads at a time for everybody.
BLOB_PULLS_PER_CONNECTION: Final = 64
BLOB_READS_MAX: Final = 8

# A larger file is more likely a mistake than an input.
BLOB_BYTES_MAX: Final = 64 << 30

# An offerer that owes a part for this long has forgotten it, and its place goes to another.
BLOB_STALL_NS: Final = 60 * NS

# What came of an upload whose connection was lost is kept so long for the next offer, of so many
# uploads and bytes: enough for a reboot, and for the largest blob.
BLOB_SET_ASIDE_NS: Final = 3600 * NS
BLOB_SET_ASIDE_MAX: Final = 64
BLOB_SET_ASIDE_BYTES: Final = 64 << 30

# Nothing that was used this recently is removed, whatever the need: a client puts its inputs first
# and then submits the jobs that refer to them, and large inputs take long to put.
BLOB_GRACE_NS: Final = 3600 * NS

# How often the store looks for what nobody used for long. Not at once: after a boot the clock may
# be wrong until it was set, and age is told by it.
BLOB_SWEEP_NS: Final = 3600 * NS
BLOB_FIRST_SWEEP_NS: Final = 600 * NS

# Blobs that may go, named at a time: the books are asked about each within one turn of the broker
# (a millisecond), and removing them keeps uploads waiting for some 20 ms.
BLOB_UNUSED_TOLD: Final = 500

# Of the oldest, so many are remembered from one look through the folder, which takes a second for
# 100,000 blobs; 4 MB.
BLOB_UNUSED_LISTED: Final = 20_000

# Blobs said to be damaged that wait to be read again; one is read at a time, and one that was found
# sound is not read again for a while, whatever is said of it: it may be large.
BLOB_SUSPECTS_MAX: Final = 64
BLOB_SUSPECT_AGAIN_NS: Final = 600 * NS

# After a search for room that did not find enough, uploads that do not fit are refused at once for
# so long: many of them shall not have the folder looked through again and again.
BLOB_VAIN_NS: Final = NS

# Damaged blobs kept for whoever wants to know what happened to the disk.
BLOB_DAMAGED_KEPT: Final = 4
BLOB_DAMAGED_BYTES: Final = 256 << 20

# Files of the store kept open: opening one for every part would cost as much as reading it.
BLOB_FILES_OPEN: Final = 16

# Fetched blobs that a worker keeps in memory, such as the functions it runs: small ones only.
BLOB_CACHED_BYTES: Final = 1 << 20
BLOB_CACHE_BYTES: Final = 64 << 20

# Of one cache, which is laid down as a tree and looked through before jobs that use it.
CACHE_FILES_MAX: Final = 200_000

# Its description: about 150 bytes a file.
MANIFEST_BYTES_MAX: Final = 64 << 20

# Files up to this size share packs of about that many bytes: a blob for each would cost two syncs
# and a round trip a file.
PACKED_FILE_BYTES: Final = 64 << 10
PACK_BYTES: Final = 4 << 20

# Caches of a group: an offer of all of them fits a frame. And caches that one job may use.
CACHES_MAX: Final = 2_000
CACHES_PER_JOB: Final = 16

# Blobs that one job's input or output refers to: with its hash and size each takes 80 bytes in a
# frame beside the file's name.
BLOBS_PER_JOB: Final = 4200

# ------------------------------------------------------------------ names

ID_LENGTH_MAX: Final = 128
NAME_LENGTH_MAX: Final = 128
SUBJECT_LENGTH_MAX: Final = 256
SUBJECT_TOKENS_MAX: Final = 16
LABELS_MAX: Final = 32
ERROR_TEXT_MAX: Final = 2000

# ------------------------------------------------------------------ time

HEARTBEAT_NS: Final = 2 * NS
SILENCE_NS: Final = 15 * NS  # seven lost heartbeats: a pause of a busy machine is not a death
REJOIN_GRACE_NS: Final = 10 * NS
TIMEOUT_MARGIN_NS: Final = 10 * NS  # the worker enforces a time limit; the leader after this much
RECONNECT_FIRST_NS: Final = NS // 20
RECONNECT_MAX_NS: Final = 5 * NS

# ------------------------------------------------------------------ jobs

MAX_ATTEMPTS: Final = 3
MAX_ATTEMPTS_BOUND: Final = 1000
LOST_WORKERS_MAX: Final = 3  # a job that took three workers down with it is poison
BACKOFF_FIRST_NS: Final = 1 * NS
BACKOFF_MAX_NS: Final = 60 * NS
DELAY_NS_MAX: Final = 3650 * 24 * 3600 * NS  # ten years: sums of times stay far below 64 bits
PRIORITY_MAX: Final = 9  # -9 .. 9: few classes, each a ring of its own

# One grant: jobs leased to one worker in one go. Larger ones made turns longer, not faster.
GRANT_JOBS_MAX: Final = 250

WAITING_MAX: Final = 2_000_000  # jobs waiting per subject
CLIENT_BYTES_MAX: Final = 4 << 30  # payload bytes of one client's unfinished jobs
TOTAL_BYTES_MAX: Final = 8 << 30
PENDING_MAX: Final = 100_000  # jobs a client holds while it is disconnected or unanswered

RETENTION_NS: Final = 7 * 24 * 3600 * NS
RESULTS_KEPT_MAX: Final = 1_000_000
RESULT_BYTES_KEPT_MAX: Final = 512 << 20  # in memory; larger results live in the journal
IDS_KEPT_MAX: Final = 2_000_000

# Quarantine: a worker that fails this many different jobs in a row is paused.
QUARANTINE_FAILURES: Final = 10
QUARANTINE_NS: Final = 60 * NS

# ------------------------------------------------------------------ journal

JOURNAL_VERSION: Final = 3
SEGMENT_BYTES: Final = 64 << 20
SNAPSHOT_INTERVAL_NS: Final = 60 * NS
KEEP_LOG_NS: Final = 7 * 24 * 3600 * NS
KEEP_LOG_BYTES: Final = 20 << 30

# Most bytes of proposals in one journal entry: bounds a turn, a sync and a record. Of jobs of 100
# bytes it holds some 12,000, which take about 12 ms to apply; the rest waits for the next entry.
ENTRY_BYTES_MAX: Final = 2 << 20

# A batch this small is synced inline when the disk is free: a thread hop costs more than it saves.
INLINE_SYNC_BYTES: Final = 32 << 10

# How far the open segment is filled with zeros ahead of its records. A sync inside what was written
# before has no new size to make safe: 0.08 ms instead of 0.14. Blocks that were only allocated are
# as quick for the smallest appends alone, because the first sync of each marks it as written. More
# at a time gains nothing, and would hold up the append that asks for it.
RESERVE_BYTES: Final = 256 << 10

# Kept free so that running work can settle when the disk is full for new jobs.
DISK_HEADROOM_BYTES: Final = 64 << 20

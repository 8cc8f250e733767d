"""Proofs about programs: a vector clock over all ranks, and what each kernel computes. They trust
nothing that `schedule.order` derives."""

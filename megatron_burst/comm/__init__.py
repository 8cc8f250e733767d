"""Moving tensors between ranks: groups, hop buffers, slots, transfers, agreement out of band.

Nothing here decides what is sent: that is in the schedule.
"""

"""Rebuilding a rank's tables from its recording, without a device, files or other ranks. No torch.

The decisions are the serving code's own: the tables, pool and tier a rank runs on. Only what they
ask of the world outside is played back: reads, agreements, sampled tokens.
"""

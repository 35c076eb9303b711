"""Deciding what runs on which devices: profile, groups, schedules, simulation, search and hand-over; no torch, clock or
file.
"""

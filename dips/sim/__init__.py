"""DREAMS: one simulated world from one seed: network, disks, crashes, around the real deciding code."""

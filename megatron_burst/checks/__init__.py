"""Checks of a run that are switched on: NaN (`guard`), calls compared with attention's definition
(`spot_checks`, `definition`), and times of waits for `--burst-log` (`clock`).
"""

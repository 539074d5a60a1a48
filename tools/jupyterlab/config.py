"""JupyterLab as `make lab` starts it: for this machine alone, quiet, and without questions of its
own.

    python -m jupyterlab --config tools/jupyterlab/config.py

A flag on the command line wins: `--port 8890`, `--no-browser`, `--ServerApp.root_dir=DIR`.
"""

from __future__ import annotations

import os
from pathlib import Path

c = get_config()  # noqa: F821  # traitlets provides it to the file that it reads

c.ServerApp.ip = "127.0.0.1"
c.ServerApp.allow_root = os.geteuid() == 0
# The whole project, so that a report of runs/ can be opened beside its notebook.
c.ServerApp.root_dir = str(Path(__file__).resolve().parents[2])
c.LabApp.default_url = "/lab/tree/notebooks"
# Ctrl-C ends it at once; by default it would ask first.
c.ServerApp.answer_yes = True
# Only the address, and what went wrong, is still shown.
c.Application.log_level = "WARN"
# JupyterLab would ask its own site for news, a newer version and a list of extensions.
# overrides.json, beside this file, answers what it would ask the user about news.
c.LabApp.app_settings_dir = str(Path(__file__).resolve().parent)
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = "jupyterlab.handlers.announcements.NeverCheckForUpdate"
c.LabApp.extension_manager = "readonly"

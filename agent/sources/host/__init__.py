"""Reading the machine that an engine runs on: its processes, its cgroup, its log."""

"""The traced path: a reverse proxy before the engines that sees what the user sees."""

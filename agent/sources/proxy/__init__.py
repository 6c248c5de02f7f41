"""A reverse proxy in front of the engines that measures what the user sees."""

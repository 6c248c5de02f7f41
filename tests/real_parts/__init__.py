"""The real things that tests run against, each with the class that starts and stops it."""

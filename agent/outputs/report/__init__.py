"""Reports of a window: its figures as a document, and the document in each format."""

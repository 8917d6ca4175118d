"""Models behind HTTP, and a page for people. It never trains, and never loads an optimizer."""

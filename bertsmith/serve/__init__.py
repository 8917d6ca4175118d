"""HTTP server for models, with a web page."""

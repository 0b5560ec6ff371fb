"""Other programs' protocols over HTTP: tables of routes over the same calls, each off unless an option turns it on."""

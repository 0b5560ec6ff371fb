"""Who is where: addresses, users and tokens, sockets in the file system. Knows no protocol."""

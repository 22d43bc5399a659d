"""The client's side: the SuperNode, the app that answers the server's messages, and the client's folder."""

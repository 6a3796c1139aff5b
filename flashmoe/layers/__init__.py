"""Linear layers that give a row the same bits for any number of rows.

api          linear, patch_linear
autograd     its gradients
operators    what torch must know about the operator
rules        the messages of its checks
"""

"""Linear layers whose bits do not depend on the number of rows.

api          linear, patch_linear
autograd     its gradients
operators    what torch must know about the operator
rules        what its checks are told as
"""

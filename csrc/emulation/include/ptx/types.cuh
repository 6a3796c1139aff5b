// Emulated: the host has fixed-width integers.
#pragma once

#include <cstdint>

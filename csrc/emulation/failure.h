// Typed failures: what went wrong, where, and what it conflicts with.
#pragma once

#include <string>

#include "emulation/site.h"

namespace flashmoe::emulation {

enum class FailureKind {
  kOutOfBounds,
  kMisaligned,
  kUninitialisedRead,
  kReadOnly,
  kPlainDereference,
  kUndefined,
  kRace,
  kGlobalRace,
  kProxyFenceMissing,
  kDivergentCollective,
  kBarrierMisuse,
  kMbarrierMisuse,
  kPhaseLapped,
  kTransactionCount,
  kTensorMap,
  kDescriptor,
  kWgmmaMisuse,
  kAccumulatorTouched,
  kOperandTouched,
  kRegisterBudget,
  kAsyncAtExit,
  kDeadlock,
  kStepLimit,
};

const char* failure_name(FailureKind kind);

struct Failure {
  FailureKind kind;
  std::string message;
  std::string what;  // the wrapper
  std::string file;  // its call site
  int line = 0;
  std::string function;
  int block = -1;
  int thread = -1;  // -1: no single thread (a deadlock, an asynchronous unit)
};

}  // namespace flashmoe::emulation

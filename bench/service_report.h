// What lmhead-bench service prints. Every function renders text; service.cc prints it.

#ifndef LMHEAD_BENCH_SERVICE_REPORT_H_
#define LMHEAD_BENCH_SERVICE_REPORT_H_

#include <optional>
#include <string>
#include <vector>

#include "bench/service_run.h"

namespace lmhead::bench {

// One repeat: a step through the service, and the same rows without it, one after the other.
struct ServiceRepeat {
  StepMeasurement step;
  std::optional<double> inprocess_seconds;
};

// One line of the table.
struct ServiceCase {
  Traffic traffic;
  std::vector<ServiceRepeat> repeats;  // At least one.
};

struct ServiceFacts {
  std::string address;
  std::string backend;
  std::string device;
};

// Shape and device, the head of the table, a line a case, and what the columns mean.
std::string RenderServiceHeader(const ServiceFacts& facts, const Traffic& traffic, int repeats);
std::string RenderServiceCase(const ServiceCase& measured);
std::string RenderServiceLegend();

// Everything, as {"service": …}; what was not measured is null.
std::string RenderServiceJson(const ServiceFacts& facts, const std::vector<ServiceCase>& cases);

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_SERVICE_REPORT_H_

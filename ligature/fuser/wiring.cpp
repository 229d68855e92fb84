#include "ligature/fuser/wiring.h"

#include <algorithm>
#include <map>

namespace ligature {

std::string place(const std::vector<BasicOpPtr>& ops, size_t i) {
  return ops[i]->name() + " (operation " + std::to_string(i) + ")";
}

Wiring wire(const std::vector<BasicOpPtr>& ops, const std::vector<std::string>& open_channels) {
  struct Producer {
    size_t op;
    size_t output;
  };
  std::map<std::string, Producer> producers;
  for (size_t i = 0; i < ops.size(); ++i) {
    for (size_t j = 0; j < ops[i]->num_extra_outputs(); ++j) {
      const std::string& channel = ops[i]->extra_output_channel(j);
      if (channel.empty()) continue;
      const auto [entry, fresh] = producers.emplace(channel, Producer{i, j});
      LIGATURE_CHECK(fresh, "channel '", channel,
                     "' has multiple producers: ", place(ops, entry->second.op), " and ",
                     place(ops, i));
    }
  }
  const auto is_open = [&](const std::string& channel) {
    return std::find(open_channels.begin(), open_channels.end(), channel) != open_channels.end();
  };

  Wiring wiring;
  wiring.inputs.resize(ops.size());
  wiring.outputs.resize(ops.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    wiring.outputs[i].resize(ops[i]->num_extra_outputs());
    for (size_t j = 0; j < ops[i]->num_extra_inputs(); ++j) {
      const std::string& channel = ops[i]->extra_input_channel(j);
      LIGATURE_CHECK(channel.empty() || !ops[i]->writes_extra_input(j), place(ops, i),
                     " works in place, so it cannot take its extra input from channel '", channel,
                     "'");
      Wiring::Input input;
      const auto producer = producers.find(channel);
      if (channel.empty() || (producer == producers.end() && is_open(channel))) {
        input.caller = wiring.caller_inputs.size();
        wiring.caller_inputs.push_back(channel);
      } else {
        LIGATURE_CHECK(producer != producers.end(), "channel '", channel, "', which ",
                       place(ops, i), " takes, has no producer");
        LIGATURE_CHECK(producer->second.op < i, "channel '", channel, "', which ", place(ops, i),
                       " takes, has no earlier producer: ", place(ops, producer->second.op),
                       " comes later");
        input.producer = producer->second.op;
        input.output = producer->second.output;
      }
      wiring.inputs[i].push_back(input);
    }
  }
  for (size_t i = 0; i < ops.size(); ++i) {
    for (size_t j = 0; j < ops[i]->num_extra_outputs(); ++j) {
      const std::string& channel = ops[i]->extra_output_channel(j);
      const bool to_user = ops[i]->extra_output_to_caller(j);
      if (!to_user && !is_open(channel)) continue;
      wiring.outputs[i][j].caller = wiring.caller_outputs.size();
      wiring.caller_outputs.push_back(channel);
      wiring.output_to_user.push_back(to_user);
    }
  }
  for (const auto& op : ops) op->lock_channels();
  return wiring;
}

bool Wiring::has_extras() const {
  const auto some = [](const auto& slots) { return !slots.empty(); };
  return std::any_of(inputs.begin(), inputs.end(), some) ||
         std::any_of(outputs.begin(), outputs.end(), some);
}

Wiring wire_without_channels(const std::vector<BasicOpPtr>& ops) {
  Wiring wiring;
  wiring.inputs.resize(ops.size());
  wiring.outputs.resize(ops.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    ops[i]->lock_channels();
    for (size_t j = 0; j < ops[i]->num_extra_inputs(); ++j) {
      wiring.inputs[i].push_back({wiring.caller_inputs.size(), Wiring::kNone, Wiring::kNone});
      wiring.caller_inputs.push_back(ops[i]->extra_input_channel(j));
    }
    for (size_t j = 0; j < ops[i]->num_extra_outputs(); ++j) {
      wiring.outputs[i].push_back({wiring.caller_outputs.size()});
      wiring.caller_outputs.push_back(ops[i]->extra_output_channel(j));
      wiring.output_to_user.push_back(true);
    }
  }
  return wiring;
}

}  // namespace ligature

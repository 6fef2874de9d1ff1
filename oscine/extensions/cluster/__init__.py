"""Many engines as one: placement, routing, disaggregation, migration and scaling, on Ray (`oscine[cluster]`)."""

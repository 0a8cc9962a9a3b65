#!/bin/bash
mv pilot.txt dish.txt
